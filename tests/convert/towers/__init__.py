"""Tests of text towers."""
