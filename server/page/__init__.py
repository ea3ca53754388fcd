"""The page at `/`: its files, as browsers get them. What they show comes from the same routes as everybody's."""
