"""vLLM's dialect: tokens in and tokens out, and the paths by which SkyRL, prime-rl and TRL control a server."""
