"""Complete runs, one YAML a file, and the bundled demo checkpoint."""
