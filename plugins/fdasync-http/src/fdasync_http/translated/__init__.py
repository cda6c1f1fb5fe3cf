"""What the dialects share that translate a body into a chat's, and what a chat says into words of their own."""
