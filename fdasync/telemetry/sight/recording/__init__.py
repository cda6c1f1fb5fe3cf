"""Records what an engine does: its last minutes, its latencies, the experts it chose. Runs on its loop."""
