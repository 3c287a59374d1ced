"""The presets that ship: one TOML a preset."""
