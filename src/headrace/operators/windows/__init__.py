"""Windows over event time: what they are (`specs`), which rows they hold (`assign`), and the
kernels that keep them (`build` chooses one).
"""
