"""Links between processes: handshakes, heartbeats, and every message once and in order, over any wire."""
