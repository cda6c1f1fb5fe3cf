"""What a router knows of blocks: which instances have them, and the identities of the blocks of prompts."""
