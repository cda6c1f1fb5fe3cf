"""The completion ports: each watches events of a device on the loop, in its own way."""
