"""Fusion IR: tensor expressions over symbolic axes. Standard library only, as everything up to `codegen`."""
