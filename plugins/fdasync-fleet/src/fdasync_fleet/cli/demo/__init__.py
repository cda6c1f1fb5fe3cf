"""`fdasync demo`: serves a checkpoint by one engine or by a pair, and compares every token and row with the library."""
