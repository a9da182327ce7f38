"""Data, models, servers and programs for the tests."""
