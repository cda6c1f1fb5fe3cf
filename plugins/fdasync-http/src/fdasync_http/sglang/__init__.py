"""SGLang's dialect: `/generate`, and the paths by which slime, Miles and AReaL control a server."""
