"""Random faults against a whole installation, for as long as one likes: `make chaos SECONDS=60`.

`schedule` draws the faults from a seed, `tasks` is what runs, `producer` and `relay` are processes,
`run` starts, breaks and heals, `checks` judges what is left.
"""
