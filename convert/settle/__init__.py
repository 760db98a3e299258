"""What is measured before a plan is complete: text, statistics, and the choices that a draft leaves open."""
