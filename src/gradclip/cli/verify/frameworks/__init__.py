"""What each framework offers itself, by scope: one module each, imported in that framework's own process."""
