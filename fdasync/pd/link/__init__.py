"""Links to other processes: handshakes, heartbeats, and every message once and in order."""
