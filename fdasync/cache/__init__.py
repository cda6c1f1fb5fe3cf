"""KV blocks and what is bound to them: identities, places in two tiers, slots; the bytes of the host tier."""
