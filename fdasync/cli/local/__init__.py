"""Instances as child processes of this one."""
