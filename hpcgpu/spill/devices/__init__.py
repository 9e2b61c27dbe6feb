"""Device memory: of simulated GPUs, and of CUDA's libraries. Arrays are identified and copied here."""
