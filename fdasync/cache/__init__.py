"""KV blocks and what is bound to them: identities, places on device and host, slots of rows, and the memory of both."""
