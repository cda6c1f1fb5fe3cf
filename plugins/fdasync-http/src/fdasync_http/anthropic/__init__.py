"""Anthropic's Messages, as a translation of chats."""
