"""Device memory: of simulated GPUs, and of CUDA's libraries, whose arrays are told apart and copied here."""
