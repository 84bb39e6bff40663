"""The names of streaming that its tests of the order of samples import, over Convoy's order."""
