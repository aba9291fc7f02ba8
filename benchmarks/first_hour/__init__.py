"""What only hardware can answer, asked in the first hour on it. See docs/first-hour.md."""
