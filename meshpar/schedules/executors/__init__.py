"""Executors: what runs the tables."""
