"""Operations on a study, for Python and for the commands."""
