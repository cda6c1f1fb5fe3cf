"""`fdasync verify-trainer`: serves prompts in every way that may change bits; a trainer's log-probs are compared."""
