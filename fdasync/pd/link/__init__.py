"""Who is there, and every message once and in order."""
