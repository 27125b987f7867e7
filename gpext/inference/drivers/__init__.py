"""Maximising a bound over sites: all at once, or one after another."""
