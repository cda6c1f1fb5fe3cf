"""fdasync: an asyncio engine framework for mixture-of-experts rollouts with exact expert routing."""
