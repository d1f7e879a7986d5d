"""Networks: by name from the zoos, their starting weights, and how they are cut into segments."""
