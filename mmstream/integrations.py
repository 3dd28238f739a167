"""Gone: importing it says what to use instead. The next version removes this file."""

from mmstream.gone import instead_of

raise ImportError(instead_of("mm.integrations"))
