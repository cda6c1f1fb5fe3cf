"""OpenAI's Responses, as a translation of chats."""
