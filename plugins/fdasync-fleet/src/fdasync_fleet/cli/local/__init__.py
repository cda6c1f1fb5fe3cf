"""Runs instances as child processes of this one: starts, watches, restarts and ends them, and keeps their sockets."""
