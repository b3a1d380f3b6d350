"""Small changes of the overlay and of the tools' core that their tests have to notice."""
