from .embeddings import (
    embedding_of as embedding_of,
    resized_embeddings as resized_embeddings,
)
from .files import (
    absent_parameters as absent_parameters,
    base_folder as base_folder,
    cached_base as cached_base,
)
from .mapped_model import (
    base_on_files as base_on_files,
)
from .model_class import (
    find_base_class as find_base_class,
)
from .samples import (
    differences_of_base as differences_of_base,
    differing_elements as differing_elements,
    differing_tensors as differing_tensors,
    identifying_samples as identifying_samples,
    identifying_tensors as identifying_tensors,
    record_of_base as record_of_base,
)
from .watch import (
    BaseWatch as BaseWatch,
)
