"""Makes an engine reachable by routers and other instances: requests, leases, hand-offs, copies of blocks, commands."""
