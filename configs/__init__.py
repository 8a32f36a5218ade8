"""What can be tuned: the schema of a recipe, how recipes are read, and the recipes that ship with Cairn."""
