"""Errors, console, units, files, processes and the Hub: what every part needs, and nothing about models."""
