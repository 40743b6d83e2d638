"""What is measured, one module for each framework that it is held against."""
