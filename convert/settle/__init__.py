"""Measurements that complete a plan: text, statistics, and the choices that a draft leaves open."""
