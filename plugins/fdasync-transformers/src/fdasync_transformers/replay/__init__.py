"""Replays recorded routing in a trainer's passes."""
