"""Evidence, known classes and conditions of the rules that engine_rules.py lists."""
