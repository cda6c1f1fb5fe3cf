"""Plans of a step's recurrent states: made on the host, read by graphs at one address."""
