"""All errors that steercap raises, drawn as one tree.

SteercapError
├── InvalidRequest (ValueError)     the request cannot be carried out; the engine never saw it
│   ├── InvalidSetting              an engine or steercap setting is unknown or invalid
│   ├── InvalidPrompt               no prompt, or a prompt is empty, of a wrong type or too long
│   ├── InvalidSelection            a `tokens=` selection is invalid for this prompt
│   │   └── EmptySelection          a `tokens=` selection selects no token
│   ├── InvalidSpec                 a CaptureSpec or SteeringSpec is malformed
│   │   ├── LayerOutOfRange         a layer this model does not have
│   │   ├── UnknownName             a site, family, codec or edit that is not registered
│   │   ├── PointSplit              a sketch or an SAE of whole rows at a point that is split over ranks
│   │   ├── TooManyEdits            more edits or vectors than the engine's tables have room for
│   │   └── InvalidEdit             an edit whose values contradict each other or the model
│   │       └── InvalidVector       an edit's vector has another width, NaN or inf, or is zero
│   ├── PointNotArmed               a site or layer without a tap in this engine
│   └── RunDiffers                  a run folder that holds a run of other settings
├── EngineFailure (RuntimeError)    the engine is missing or unusable
│   ├── EngineDied                  a process of the engine has ended, or a thread in it
│   ├── ModelNotLoaded              vLLM could not load the model
│   │   └── ModelTooLarge           the model's weights do not fit into memory
│   ├── UnsupportedModel            a model whose layers steercap cannot read
│   │   └── ModelNotProved          captured rows differ from what their site's name says
│   ├── UnsupportedRunner           a model runner or parallel layout steercap does not know
│   ├── TapsNotInstalled            the probe at start found a tap that does not run
│   ├── MainGuardMissing            a script starts an engine while it is being imported
│   ├── ModelClosed                 the model was closed, or never opened
│   ├── WrongEventLoop              a model used in another event loop than the one it was started in
│   ├── MemoryNotShared             transport="shared", or an SAE, but a worker is on another machine
│   ├── WorkerFailure               a worker answered a call with an error
│   ├── InvalidFrame                a message from another process is of another version, or damaged
│   └── ServerFailure               a server cannot be reached, or its answer is not valid
├── CaptureError (RuntimeError)     requested rows cannot be returned
│   ├── CaptureIncomplete           rows are missing or carry another token's label
│   ├── CaptureNotFinite            rows have NaN or infinity, which the spec does not allow
│   ├── CaptureMemoryFull           no room for the rows, and none can become free
│   ├── SAEMemoryFull               no room on the workers for an SAE
│   ├── CaptureNotFetched           `captures` read before `fetch()`
│   └── CaptureReleased             a handle used after its rows were released
├── SketchError (RuntimeError)      a sketch cannot be made, or can no longer be trusted
│   ├── SketchMemoryFull            no room for its statistics
│   ├── SketchIncomplete            the workers do not hold the rows that were counted
│   └── SketchClosed                a sketch used after its context has ended
├── SteeringError (RuntimeError)    requested steering did not happen
│   ├── SteeringNotApplied          a worker did not make every edit, so the text is withheld
│   └── SteeringSlotsFull           no slot is free, and overflow="error"
├── PersonaError (RuntimeError)     a pipeline from traits to vectors cannot continue
│   ├── JudgeFailed                 the endpoint that judges answers refuses, or cannot be reached
│   ├── RunUnfinished               results are requested of a run with unfinished roles
│   └── TooFewKept                  too few answers show the trait or its opposite for a direction
├── CollectionStopped (OSError)      a data set can no longer be written, or Ray's actors were lost
├── TrainingDiverged (RuntimeError)  losses or vectors of a training are NaN or infinite
├── MissingExtra (ImportError)      a library of one of the package's extras is not installed
└── InvalidFile (ValueError)        a file is truncated, of another format or of a newer version
"""


class SteercapError(Exception):
    """Root of every error raised by steercap."""


class InvalidRequest(SteercapError, ValueError):
    """The request is invalid; raised before the engine receives it."""


class InvalidSetting(InvalidRequest):
    """An engine argument or steercap setting is unknown, or its value is invalid."""


class InvalidPrompt(InvalidRequest):
    """A list of prompts is empty, or a prompt is malformed, has no token, or exceeds the model's context."""


class InvalidSelection(InvalidRequest):
    """A `tokens=` selection is invalid for this prompt."""


class EmptySelection(InvalidSelection):
    """A `tokens=` selection selects no token."""


class InvalidSpec(InvalidRequest):
    """A specification of captures or edits contradicts itself or the model."""


class PointSplit(InvalidSpec):
    """A sketch or an SAE needs whole rows at a point whose rows are split over tensor-parallel ranks."""


class TooManyEdits(InvalidSpec):
    """More edits at one point, or more vectors, than the engine's tables have room for."""


class InvalidEdit(InvalidSpec):
    """The numbers, bounds or layers of an edit contradict each other or the model."""


class InvalidVector(InvalidEdit):
    """A vector of an edit has the wrong width, is not finite, or is zero where a direction is needed."""


class LayerOutOfRange(InvalidSpec, KeyError):
    """A layer index is outside the model, or absent from a container indexed by layer; also a KeyError."""

    __str__ = Exception.__str__  # that of KeyError is a repr


class UnknownName(InvalidSpec, KeyError):
    """A name of a site, family, codec or edit is not registered; the message lists known names. Also a KeyError."""

    __str__ = Exception.__str__


class PointNotArmed(InvalidRequest):
    """A requested point has no tap in this engine; the message says how to arm it."""


class RunDiffers(InvalidRequest):
    """A run folder contains a run of other settings; the message names the differing settings."""


class EngineFailure(SteercapError, RuntimeError):
    """The engine is missing or unusable."""


class EngineDied(EngineFailure):
    """A process of the engine, or a thread in one, has ended unexpectedly; the message names it and its log."""


class ModelNotLoaded(EngineFailure):
    """vLLM could not load the model; the cause is chained."""


class ModelTooLarge(ModelNotLoaded):
    """The model's weights do not fit into the available memory; raised before the engine is started."""


class UnsupportedModel(EngineFailure):
    """The model's layers, or a requested site of the model, cannot be tapped."""


class ModelNotProved(UnsupportedModel):
    """The proof at start failed: captured rows differ from what their site's name says; the message has the error."""


class UnsupportedRunner(EngineFailure):
    """Steercap has no adapter for vLLM's model runner, release, parallel layout or an engine option."""


class TapsNotInstalled(EngineFailure):
    """The probe at start found an armed tap that does not run in a forward pass."""


class MainGuardMissing(EngineFailure):
    """A script starts an engine outside `if __name__ == "__main__":`, so that spawned processes would start it too."""


class ModelClosed(EngineFailure):
    """The model was used before it was opened or after it was closed."""


class WrongEventLoop(EngineFailure):
    """The model was used in another event loop, thread or process than the one it was started in."""


class MemoryNotShared(EngineFailure):
    """A worker on another machine or in another container cannot share memory with the client, for rows or an SAE."""


class WorkerFailure(EngineFailure):
    """A worker process answered a call with an error."""


class InvalidFrame(EngineFailure):
    """A message from another process is damaged, out of bounds, or of another version of steercap."""


class ServerFailure(EngineFailure):
    """A server cannot be reached, refuses the key, fails, or is not one of steercap's."""


class CaptureError(SteercapError, RuntimeError):
    """Requested rows cannot be returned."""


class CaptureIncomplete(CaptureError):
    """Captured rows are missing, or labelled with another token or position than expected."""


class CaptureNotFinite(CaptureError):
    """Captured rows contain NaN or infinity; `CaptureSpec(allow_nonfinite=True)` returns them."""


class CaptureMemoryFull(CaptureError):
    """The capture memory has no room for the rows of a request."""


class SAEMemoryFull(CaptureError):
    """The workers have no room for an SAE that a request needs."""


class CaptureNotFetched(CaptureError):
    """`captures` was read before `fetch()`."""


class CaptureReleased(CaptureError):
    """The handle was used after its rows had been released."""


class SketchError(SteercapError, RuntimeError):
    """A sketch cannot be made, or its statistics are no longer valid."""


class SketchMemoryFull(SketchError):
    """A sketch's statistics need more memory than `sketch_bytes`, or than the workers' devices have."""


class SketchIncomplete(SketchError):
    """The workers' statistics of a sketch do not match the rows counted for it; the sketch must be begun anew."""


class SketchClosed(SketchError):
    """The sketch was used after its context had ended, or a request that had joined it ended after that."""


class SteeringError(SteercapError, RuntimeError):
    """Requested steering did not happen."""


class SteeringNotApplied(SteeringError):
    """A worker did not make every edit that the spec requires for the request's tokens; the text is withheld."""


class SteeringSlotsFull(SteeringError):
    """No steering slot, or no memory for vectors, is free, and `overflow="error"` forbids waiting."""


class PersonaError(SteercapError, RuntimeError):
    """A pipeline from traits to vectors cannot continue."""


class JudgeFailed(PersonaError):
    """The endpoint that judges answers refuses, cannot be reached, or answers in another form."""


class RunUnfinished(PersonaError):
    """Results of a run are requested while some of its roles are unfinished; the message names the roles."""


class TooFewKept(PersonaError):
    """After filtering by score, too few answers are left to compute a direction."""


class CollectionStopped(SteercapError, OSError):
    """A data set can no longer be written, or Ray's actors were lost; the same call resumes it."""


class TrainingDiverged(SteercapError, RuntimeError):
    """Losses or vectors of a training are NaN or infinite; the message says what to change."""


class MissingExtra(SteercapError, ImportError):
    """A required library is not installed; the message names the extra of the package that installs it."""


class InvalidFile(SteercapError, ValueError):
    """A file is truncated, of another format, or of a newer version."""


def first_error(error: BaseException) -> BaseException:
    """Return the error itself, or the first error inside a (nested) exception group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
