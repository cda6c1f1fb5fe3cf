"""OpenAI's API: completions, chats, models, and the tokenizer."""
