"""Every error steercap raises, drawn as one tree.

SteercapError
├── InvalidRequest (ValueError)     the request cannot be carried out; the engine never saw it
│   ├── InvalidSetting              an engine or steercap setting that does not exist or fit
│   ├── InvalidPrompt               no prompt, or one that is empty, of a wrong type, or too long
│   ├── InvalidSelection            a `tokens=` that means nothing here
│   │   └── EmptySelection          ... or that selects no token
│   ├── InvalidSpec                 a malformed CaptureSpec or SteeringSpec
│   │   ├── LayerOutOfRange         a layer this model does not have
│   │   ├── UnknownName             a site, family, codec or edit that is not registered
│   │   ├── PointSplit              a sketch or an SAE of whole rows at a point that is split over ranks
│   │   ├── TooManyEdits            more edits than the engine's tables or vectors than its bank can hold
│   │   └── InvalidEdit             an edit whose numbers do not fit
│   │       └── InvalidVector       ... or whose vector is of another width, NaN, inf or zero
│   ├── PointNotArmed               a site or layer without a tap in this engine
│   └── RunDiffers                  a run folder that holds a run of other settings
├── EngineFailure (RuntimeError)    the engine is missing or unusable
│   ├── EngineDied                  a process of the engine has ended, or a thread in it
│   ├── ModelNotLoaded              vLLM could not load the model
│   │   └── ModelTooLarge           ... or would not: its weights do not fit into memory
│   ├── UnsupportedModel            a model whose layers steercap cannot read
│   │   └── ModelNotProved          rows that are not what their names say
│   ├── UnsupportedRunner           a model runner or parallel layout steercap does not know
│   ├── TapsNotInstalled            the probe found a tap that does not fire
│   ├── MainGuardMissing            a script starts an engine while it is being imported
│   ├── ModelClosed                 the model was closed, or never opened
│   ├── WrongEventLoop              a model used in another event loop than the one it was started in
│   ├── MemoryNotShared             transport="shared", or an SAE, but a worker is on another machine
│   ├── WorkerFailure               a worker answered a call with an error
│   ├── InvalidFrame                what came from another process is no message of this version, or damaged
│   └── ServerFailure               a server cannot be reached, or answers otherwise than it should
├── CaptureError (RuntimeError)     rows that were asked for cannot be returned
│   ├── CaptureIncomplete           rows are missing or carry another token's label
│   ├── CaptureNotFinite            rows hold NaN or infinity, and that was not asked for
│   ├── CaptureMemoryFull           no room for the rows, and none is coming
│   ├── SAEMemoryFull               no room on the workers for an SAE that is to read rows
│   ├── CaptureNotFetched           `captures` read before `fetch()`
│   └── CaptureReleased             a handle used after its rows were released
├── SketchError (RuntimeError)      a sketch cannot be made, or can no longer be trusted
│   ├── SketchMemoryFull            no room for its statistics
│   ├── SketchIncomplete            the workers do not hold the rows that were counted
│   └── SketchClosed                a sketch used after its context has ended
├── SteeringError (RuntimeError)    steering that was asked for did not happen
│   ├── SteeringNotApplied          a worker did not make every edit, so the text is withheld
│   └── SteeringSlotsFull           no slot is free, and overflow="error"
├── PersonaError (RuntimeError)     a pipeline that cannot go on
│   ├── JudgeFailed                 the endpoint that judges answers refuses, or cannot be reached
│   ├── RunUnfinished               results are asked of a folder some of whose roles are not done
│   └── TooFewKept                  too few answers show the trait, or its opposite, to find a direction
├── CollectionStopped (OSError)      a data set can no longer be written to, or Ray's actors were lost
├── TrainingDiverged (RuntimeError)  losses of a training are no longer numbers
├── MissingExtra (ImportError)      a library that an extra of the package brings is not installed
└── InvalidFile (ValueError)        a file that is not what its name or header claims
"""


class SteercapError(Exception):
    """Root of every error raised by steercap."""


class InvalidRequest(SteercapError, ValueError):
    """The request cannot be carried out; raised before the engine sees it."""


class InvalidSetting(InvalidRequest):
    """A setting that does not exist, or whose value does not fit."""


class InvalidPrompt(InvalidRequest):
    """An empty list of prompts, a prompt that is none or has no token, or one the model's context cannot hold."""


class InvalidSelection(InvalidRequest):
    """A `tokens=` selection that means nothing for this prompt."""


class EmptySelection(InvalidSelection):
    """A `tokens=` selection that selects no token."""


class InvalidSpec(InvalidRequest):
    """A specification of captures or edits that contradicts itself or the model."""


class PointSplit(InvalidSpec):
    """A sketch or an SAE that needs whole rows, at a point whose rows are split over tensor-parallel ranks."""


class TooManyEdits(InvalidSpec):
    """More edits at one point, or more vectors, than this engine was started for."""


class InvalidEdit(InvalidSpec):
    """An edit that contradicts itself: its numbers, its bounds, its layers."""


class InvalidVector(InvalidEdit):
    """A vector of an edit that is of the wrong width, not finite, or zero where its direction counts."""


class LayerOutOfRange(InvalidSpec, KeyError):
    """A layer index outside the model, or outside a container indexed by layer; a KeyError, as mappings raise."""

    __str__ = Exception.__str__  # that of KeyError is a repr


class UnknownName(InvalidSpec, KeyError):
    """A name that is not registered; the message lists the known ones. It is a KeyError, as mappings raise."""

    __str__ = Exception.__str__


class PointNotArmed(InvalidRequest):
    """A point without a tap in this engine; the message says how to arm it."""


class RunDiffers(InvalidRequest):
    """A run folder holds a run of other settings; the message names what differs."""


class EngineFailure(SteercapError, RuntimeError):
    """The engine is missing or unusable."""


class EngineDied(EngineFailure):
    """A process of the engine, or a thread in it, has ended; the message names it and its log."""


class ModelNotLoaded(EngineFailure):
    """vLLM could not load the model; the cause is chained."""


class ModelTooLarge(ModelNotLoaded):
    """The weights of the model do not fit into the memory there is; raised before the engine is started."""


class UnsupportedModel(EngineFailure):
    """A model whose layers steercap cannot read."""


class ModelNotProved(UnsupportedModel):
    """Captured rows are not what their names say: the proof at start failed; the message gives the deviation."""


class UnsupportedRunner(EngineFailure):
    """A model runner or a parallel layout that steercap has no adapter for."""


class TapsNotInstalled(EngineFailure):
    """The start-up probe found an armed tap that does not fire."""


class MainGuardMissing(EngineFailure):
    """A script starts an engine outside `if __name__ == "__main__":`."""


class ModelClosed(EngineFailure):
    """The model was used before it was opened or after it was closed."""


class WrongEventLoop(EngineFailure):
    """The model was used in another event loop, thread or process than the one it was started in."""


class MemoryNotShared(EngineFailure):
    """A worker's arena cannot be mapped here, or an SAE there: it is on another machine or in another container."""


class WorkerFailure(EngineFailure):
    """A worker process answered a call with an error."""


class InvalidFrame(EngineFailure):
    """Bytes from another process are not a valid message of this steercap version, or damaged, or out of bounds."""


class ServerFailure(EngineFailure):
    """A server cannot be reached, refuses the key, fails, or is none of steercap's."""


class CaptureError(SteercapError, RuntimeError):
    """Rows that were asked for cannot be returned."""


class CaptureIncomplete(CaptureError):
    """Rows are missing, or carry the label of another token than expected."""


class CaptureNotFinite(CaptureError):
    """Rows hold NaN or infinity; `CaptureSpec(allow_nonfinite=True)` hands them over."""


class CaptureMemoryFull(CaptureError):
    """The capture memory cannot hold the rows of this request."""


class SAEMemoryFull(CaptureError):
    """The workers have no room for an SAE that a request needs."""


class CaptureNotFetched(CaptureError):
    """`captures` was read before `fetch()`."""


class CaptureReleased(CaptureError):
    """The handle was used after its rows had been released."""


class SketchError(SteercapError, RuntimeError):
    """A sketch cannot be made, or can no longer be trusted."""


class SketchMemoryFull(SketchError):
    """The statistics of a sketch need more memory than sketches may have, or than the workers' devices have."""


class SketchIncomplete(SketchError):
    """The workers' statistics of a sketch do not match the rows counted for it; it must be begun anew."""


class SketchClosed(SketchError):
    """The sketch was used, or a request that had joined it ended, after its context had ended."""


class SteeringError(SteercapError, RuntimeError):
    """Steering that was asked for did not happen."""


class SteeringNotApplied(SteeringError):
    """A worker did not make every edit that the spec and the tokens require; the text is withheld."""


class SteeringSlotsFull(SteeringError):
    """No slot or no room for vectors is free, and the request was not allowed to wait."""


class PersonaError(SteercapError, RuntimeError):
    """A pipeline from traits to vectors cannot go on."""


class JudgeFailed(PersonaError):
    """The endpoint that judges answers refuses, cannot be reached, or answers in another form."""


class RunUnfinished(PersonaError):
    """The results of a run are asked for, and some of its roles are not done; the message names them."""


class TooFewKept(PersonaError):
    """Too few answers are left, after filtering by score, to find a direction with."""


class CollectionStopped(SteercapError, OSError):
    """A data set cannot be written to any more, or Ray's actors were lost; the same call resumes where it stopped."""


class TrainingDiverged(SteercapError, RuntimeError):
    """The losses or vectors of a training are no longer numbers; the message says after which step."""


class MissingExtra(SteercapError, ImportError):
    """A library that is not installed; the message says which extra of the package brings it."""


class InvalidFile(SteercapError, ValueError):
    """A file that is truncated, of another format, or of a newer version."""


def first_error(error: BaseException) -> BaseException:
    """Return the error itself, or the first error in a (nested) group that is not itself a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
