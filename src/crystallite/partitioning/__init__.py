"""Which block each neuron goes to: by chance, by what inputs have in common, by what blocks explain."""
