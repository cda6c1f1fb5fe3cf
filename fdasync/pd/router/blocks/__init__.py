"""What a router knows of blocks: who has which, and the identities of prompts."""
