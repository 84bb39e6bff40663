"""Whether models learn, and what a choice is worth: training runs whose losses are compared.

studies      the runs of each study: recipes and settings, by subject and seed
curves       what is taken of a run's log
plots        the picture of a study
__main__     ``python -m bench.learning STUDY``: train what is missing, write the table, draw
"""
