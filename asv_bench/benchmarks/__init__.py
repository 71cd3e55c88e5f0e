"""Benchmarks for airspeed velocity: nouns for classes, time_, peakmem_ and track_ for methods."""
