// Package wire holds the JSON bodies that Tagout's daemons and its CLI exchange over unix sockets. It holds
// types only. The routes:
//
//	every daemon   GET    /healthz                 200 Health while serving, 503 with a Problem otherwise
//	               GET    /metrics                 Prometheus text format
//	proxy,         PUT    /v1/sessions/{kid}       session.Session -> Ack; only sandboxd (uid 0)
//	dnsfilter      DELETE /v1/sessions/{kid}       cuts what is open; idempotent
//	dnsfilter      POST   /v1/names                NameQuery -> Name; only the proxy
//	               POST   /v1/claims               NameClaim -> Name; only the proxy
//	credd          POST   /v1/sessions             MintRequest -> MintReply; only uid 0
//	               GET    /v1/sessions/{kid}/use   CredentialUse so far; only uid 0
//	               POST   /v1/sessions/{kid}/renew -> MintReply of the JWTs that the kid holds itself; only uid 0
//	               DELETE /v1/sessions/{kid}       forgets its tokens; uid 0 and killswitchd
//	               POST   /v1/revoke               RevokeRequest -> RevokeReply; uid 0 and killswitchd
//	               POST   /v1/resolve              ResolveRequest -> ResolveReply; only the proxy
//	               GET    /v1/tokens               []TokenInfo; query kid, session, id or secret; only uid 0
//	               POST   /v1/tokens/revoke        TokenRevokeRequest -> TokenRevokeReply; only uid 0
//	               GET    /v1/revocations          stream of Revoked, one JSON a line; only the proxy
//	               POST   /introspect              form token=… -> Introspection (RFC 7662); the group
//	               POST   /revoke                  form token=… (RFC 7009); only uid 0
//	               GET    /.well-known/jwks.json, /statuslists/{id}: the issuer's keys and status lists; the group
//	               GET    /v1/issuer               IssuerInfo; only uid 0, as what follows
//	               POST   /v1/issuer/rotate        -> IssuerRotation
//	               POST   /v1/issuer/clients       IssuerClientRequest -> IssuerClientReply
//	               DELETE /v1/issuer/clients/{name}
//	               PUT    /v1/vault/{name}         VaultEntry -> VaultInfo; only uid 0
//	               POST   /v1/vault/{name}/rotate  RotateRequest -> VaultInfo; only uid 0
//	               GET    /v1/vault                []VaultInfo, never a value; only uid 0
//	               DELETE /v1/vault/{name}         only uid 0
//	               GET    /v1/leases               []Leased, never a value; only uid 0
//	               GET    /v1/vault-state          VaultState; only uid 0
//	               POST   /v1/vault-unlock         UnlockRequest -> VaultState; only uid 0
//	               POST   /v1/vault-seal           SealRequest -> VaultState; only uid 0
//	killswitchd    POST   /v1/stop                 StopRequest -> stream of StopEvent, one JSON a line
//	               GET    /v1/tags                 []Tag; the group
//	               POST   /v1/release              ReleaseRequest -> 403: a release is signed
//	               POST   /v1/order                SignedOrder -> a stop's stream of StopEvent, or a release's Tag
//	               POST   /v1/clear                Scope -> 200, or 423 with a Problem while a tag hangs on it
//	               GET    /v1/status               KillStatus
//	               POST   /v1/proof                proves the layers now -> ProofReport; only uid 0
//	               POST   /v1/lease                LeaseRequest -> LeaseReply; only sandboxd (uid 0)
//	sandboxd       everything that others may program against is in deploy/schema/openapi.json; in short:
//	               POST   /v1/kids                 SpawnRequest -> Kid
//	               GET    /v1/kids[?all=1]         []Kid; with all also those of proofs
//	               GET    /v1/kids/{kid}           Kid
//	               DELETE /v1/kids/{kid}?reason=…  idempotent
//	               POST   /v1/kids/{kid}/pause     ChangeRequest; freezes it; idempotent
//	               POST   /v1/kids/{kid}/resume    ChangeRequest; refused while a tag hangs on it; idempotent
//	               POST   /v1/kids/{kid}/hold      -> stream: one line once it is held, then until either side ends
//	               POST   /v1/kids/{kid}/exec      ExecRequest -> stream of ExecFrame, one JSON a line (exec.go)
//	               GET    /v1/kids/{kid}/exec      WebSocket, ExecProtocol
//	               GET    /v1/kids/{kid}/execs     []Exec
//	               GET    /v1/kids/{kid}/execs/{id}         Exec
//	               POST   /v1/kids/{kid}/execs/{id}/attach  stream of ExecFrame, as exec
//	               GET    /v1/kids/{kid}/execs/{id}/attach  WebSocket, ExecProtocol
//	               DELETE /v1/kids/{kid}/execs/{id}?reason=…  ends it, or forgets one that has ended; idempotent
//	               PUT    /v1/kids/{kid}/policy    PolicyRequest -> PolicyReply; an unreadable card changes nothing
//	               POST   /v1/order                SignedOrder -> OrderReply
//	               POST   /v1/kids/{kid}/grants    GrantRequest -> Grant; 403 where a person with a key could sign it
//	               GET    /v1/kids/{kid}/grants    []Grant, those that hold
//	               DELETE /v1/kids/{kid}/grants/{id}?by=…&reason=…  cuts what lived on it; idempotent
//	               GET    /v1/kids/{kid}/files?path=…[&archive=tar]  bytes; PUT: bytes -> Carried
//	               GET    /v1/kids/{kid}/files/list?path=…  []File
//	               GET    /v1/kids/{kid}/events    server-sent audit records
//	               POST   /v1/tool-calls           ToolCall, to be recorded
//	               POST   /v1/proof                ProofKid, which lives until the connection ends; uid 0 and killswitchd
//	               POST   /v1/proof/packet         ProofPacket -> ProofPacketReply; likewise
//	               DELETE /v1/proof                destroys what proofs have left; likewise
package wire

import (
	"net/netip"
	"time"

	"tagout/internal/reason"
)

// Health is the answer of a daemon that is healthy.
type Health struct {
	Status  string `json:"status"`            // "ok"
	Warning string `json:"warning,omitempty"` // what is wrong all the same
}

// Problem is an RFC 9457 problem body; every refusal on every socket has this form.
type Problem struct {
	Type   string      `json:"type,omitempty"`
	Title  string      `json:"title"`
	Status int         `json:"status"`
	Detail string      `json:"detail,omitempty"` // says what to do
	Reason reason.Code `json:"reason,omitempty"`
}

// Ack acknowledges a policy: the sender may rely on it being enforced.
type Ack struct {
	Kid        string `json:"kid"`
	Generation uint64 `json:"generation"`
	Cut        int    `json:"cut,omitempty"` // connections that the new policy no longer allows, and that were cut
}

// PolicyRequest replaces the egress policy of a living kid with that of another card text.
type PolicyRequest struct {
	Card     string `json:"card"`
	CardFile string `json:"card_file,omitempty"` // only for messages
	By       string `json:"by"`
	Reason   string `json:"reason"`
}

// PolicyReply says that every enforcement point has taken the new policy.
type PolicyReply struct {
	Generation uint64 `json:"generation"`
	Cut        int    `json:"cut"`
}

// GrantRequest asks for a deliberate, expiring exception for one kid. It never overrides a deny rule.
type GrantRequest struct {
	Host     string        `json:"host"` // exact name
	Port     uint16        `json:"port"`
	Protocol string        `json:"protocol,omitempty"` // tls, http or tcp; empty: http on port 80, tls otherwise
	For      time.Duration `json:"for_ns"`
	By       string        `json:"by"`
	Reason   string        `json:"reason"`
}

// Grant is an exception that holds until Expires.
type Grant struct {
	ID       string    `json:"id"` // ULID
	Host     string    `json:"host"`
	Port     uint16    `json:"port"`
	Protocol string    `json:"protocol"`
	By       string    `json:"by"`
	Reason   string    `json:"reason"`
	Placed   time.Time `json:"placed"`
	Expires  time.Time `json:"expires"`         // wall clock, for people; the deadline itself follows the boot clock
	Order    string    `json:"order,omitempty"` // the signed order that placed it; "": nobody signed
	Key      string    `json:"key,omitempty"`   // id of the key that signed it
}

// NameQuery asks which name a virtual address stands for in a session.
type NameQuery struct {
	Mark uint32     `json:"mark"`
	Addr netip.Addr `json:"addr"`
}

// Name is the answer; an unknown address is answered with 404.
type Name struct {
	Name string `json:"name"`
}

// NameClaim asks whether a session may have a name resolved that matches a wildcard and was perhaps never
// looked up (explicit proxying). A yes counts among the session's wildcard names, as a lookup does.
type NameClaim struct {
	Mark uint32 `json:"mark"`
	Name string `json:"name"`
}

// Scope says what a stop, a tag or a question is about. Exactly one of the fields is set.
type Scope struct {
	Kid  string `json:"kid,omitempty"`
	Card string `json:"card,omitempty"`
	All  bool   `json:"all,omitempty"` // the whole box
}

// Layer is one of the three stop layers.
type Layer string

// Layers.
const (
	LayerSession    Layer = "session"
	LayerNetwork    Layer = "network"
	LayerCredential Layer = "credential"
)

// AllLayers lists the layers in the order in which they are shown. They fire at the same time.
func AllLayers() []Layer { return []Layer{LayerSession, LayerNetwork, LayerCredential} }

// StopRequest orders a stop. Empty Layers means all three.
type StopRequest struct {
	Scope  Scope   `json:"scope"`
	Layers []Layer `json:"layers,omitempty"`
	By     string  `json:"by"`
	Reason string  `json:"reason"`
	Cause  string  `json:"cause,omitempty"` // "order", or "http" of a program; killswitchd alone sets any other
	Nonce  string  `json:"nonce,omitempty"` // of a proof: killswitchd knows its own orders by it
}

// State is how far a layer got at one enforcement point. Complete is said only of what was observed.
type State string

// States.
const (
	StateFired     State = "fired"              // the kernel took the order
	StateObserved  State = "observed"           // and its effect was seen
	StateContained State = "contained-not-dead" // network and credential are done, processes remain
	StatePartial   State = "partial"
	StateFailed    State = "failed"
)

// StopEvent is one line of a stop's stream. The last one has Final set and repeats the whole outcome.
type StopEvent struct {
	Stop    string        `json:"stop"` // ULID of the stop
	Kid     string        `json:"kid,omitempty"`
	Layer   Layer         `json:"layer,omitempty"`
	Point   string        `json:"point,omitempty"` // cgroup, bpf-session, sockets, credd, tag, …
	State   State         `json:"state,omitempty"`
	Elapsed time.Duration `json:"elapsed_ns"` // since the order was received, CLOCK_MONOTONIC
	Detail  string        `json:"detail,omitempty"`
	Final   *StopReport   `json:"final,omitempty"`
}

// StopReport is the outcome of one stop.
type StopReport struct {
	Stop   string                `json:"stop"`
	State  State                 `json:"state"` // the worst of all points
	Kids   []string              `json:"kids"`
	Layers map[Layer]LayerReport `json:"layers"`
	Tag    *Tag                  `json:"tag,omitempty"`
	// Received is when killswitchd received the order, on CLOCK_BOOTTIME: the zero of every other time in here.
	Received time.Duration `json:"received_boot_ns"`
	// Degraded names what was broken around the stop, and that it did without: a log, a daemon, a filesystem.
	Degraded []string `json:"degraded,omitempty"`
}

// LayerReport sums one layer up over all kids and points.
type LayerReport struct {
	State    State         `json:"state"`
	Fired    time.Duration `json:"fired_ns"`    // order received to last point fired
	Observed time.Duration `json:"observed_ns"` // order received to effect seen; 0 where it was not seen
	Detail   string        `json:"detail,omitempty"`
}

// Tag hangs on a scope after a stop: while it hangs, nothing in the scope spawns, execs, connects or gets a
// token. Releasing it restarts nothing.
type Tag struct {
	Stop       string    `json:"stop"`
	Scope      Scope     `json:"scope"`
	Layers     []Layer   `json:"layers"`
	Marks      []uint32  `json:"marks,omitempty"` // sessions that it stopped
	By         string    `json:"by"`
	Reason     string    `json:"reason"`
	Cause      string    `json:"cause"`
	Placed     time.Time `json:"placed"`
	State      State     `json:"state,omitempty"` // of its stop by now; "": under way, or given before killswitchd started
	Released   time.Time `json:"released,omitzero"`
	ReleasedBy string    `json:"released_by,omitempty"`

	Order     string     `json:"order,omitempty"`     // id of the signed order that placed it; empty: nobody signed
	Key       string     `json:"key,omitempty"`       // NAME+HASH of the key that signed
	Peer      string     `json:"peer,omitempty"`      // "uid:N" of whoever gave an order that nobody signed
	Approvals []Approval `json:"approvals,omitempty"` // of its release, by people who cannot release it alone

	CanRelease string `json:"can_release,omitempty"` // who can take it off by now, in words; only in answers
}

// Approval is one person's signed word that a tag may come off, when it takes two.
type Approval struct {
	By     string    `json:"by"`
	Key    string    `json:"key"`
	Order  string    `json:"order"`
	Reason string    `json:"reason"`
	At     time.Time `json:"at"`
}

// ReleaseRequest asks to take a tag off without a signature. It is refused, and the refusal says who can do it.
type ReleaseRequest struct {
	Stop   string `json:"stop"`
	By     string `json:"by"`
	Reason string `json:"reason"`
}

// SignedOrder carries an order as package authority signs it.
type SignedOrder struct {
	Note     string `json:"note"`
	Card     string `json:"card,omitempty"`      // of a policy: the card's text, whose hash was signed
	CardFile string `json:"card_file,omitempty"` // only for messages
}

// OrderReply is what sandboxd made of a signed order; empty: the grant is gone.
type OrderReply struct {
	Grant  *Grant       `json:"grant,omitempty"`
	Policy *PolicyReply `json:"policy,omitempty"`
}

// KillStatus is killswitchd's view of itself.
type KillStatus struct {
	Layers map[Layer]LayerStatus `json:"layers"`
	Tags   []Tag                 `json:"tags"`
	Every  time.Duration         `json:"proof_every_ns"`
	Busy   bool                  `json:"proving"` // a proof is under way, or about to be tried for the first time
}

// LayerStatus says whether a layer could fire now, and what its lamp shows.
type LayerStatus struct {
	Armed  bool       `json:"armed"` // it could fire now; the lamp asks for a proof as well
	State  LampState  `json:"state"`
	Detail string     `json:"detail,omitempty"` // why it is degraded, or what is wrong all the same
	Proof  *LastProof `json:"proof,omitempty"`  // nil: none was carried out yet
}

// SpawnRequest asks for a kid. Card is the card's YAML text; InputDir resolves its relative input paths.
type SpawnRequest struct {
	Name     string `json:"name,omitempty"`           // empty: one is made up
	Purpose  string `json:"purpose" maxLength:"4096"` // why, for the record; not blank
	Card     string `json:"card"`
	CardFile string `json:"card_file,omitempty"` // only for messages
	InputDir string `json:"input_dir,omitempty"`
	Held     bool   `json:"held,omitempty"` // the kid lives only as long as somebody holds it
	// Order is a signed order for this spawn: for this card, name and purpose. Needed where the box's configuration says so.
	Order string `json:"order,omitempty"`
	// Approval is a signed order that lets this kid live on the machine's network, for this card, name and purpose. A card
	// with `network: host` needs one, from a person with the role host-network.
	Approval string `json:"approval,omitempty"`
}

// KidState is where a kid is in its life.
type KidState string

// Kid states.
const (
	KidSpawning   KidState = "spawning"
	KidRunning    KidState = "running"
	KidPaused     KidState = "paused"  // frozen: nothing in it runs until it is resumed
	KidStopped    KidState = "stopped" // by a stop; only destroy is left
	KidExited     KidState = "exited"  // its init ended; only destroy is left
	KidOOM        KidState = "oom"     // it ran out of memory and was killed whole; only destroy is left
	KidDestroying KidState = "destroying"
)

// Stages of a spawn, in the names of timings and metrics.
const (
	StageAllocation = "allocation" // name, number, cgroup, records, tokens
	StageFilesystem = "filesystem" // workspace, inputs, root
	StageNetwork    = "network"    // namespaces, link, and that every guard of it knows the kid
	StageRuntime    = "runtime"    // the container and its init

	StageFirstCommand = "first-command" // from the first command's request until it runs; after the spawn
	StageTotal        = "total"         // the spawn, from its request to its end: the sum of its stages
)

// SpawnStages returns the stages that make up a spawn, in the order in which they begin.
func SpawnStages() []string {
	return []string{StageAllocation, StageNetwork, StageFilesystem, StageRuntime}
}

// Kid is what people see of a kid.
type Kid struct {
	Name     string                   `json:"name"`
	Session  string                   `json:"session"`
	State    KidState                 `json:"state"`
	Cause    string                   `json:"cause,omitempty"` // how it came to its state, where nobody asked for it
	Purpose  string                   `json:"purpose"`
	Card     string                   `json:"card"`
	Owner    string                   `json:"owner,omitempty"`
	SameCard []string                 `json:"same_card,omitempty"` // other kids of this card; only in the answer to a spawn
	Held     bool                     `json:"held,omitempty"`      // it goes when nobody holds it any more
	Ends     time.Time                `json:"ends,omitzero"`       // of its lifetime; for people, the boot clock decides
	Idle     time.Duration            `json:"idle_ns,omitempty"`   // it goes when nothing has run in it for so long
	Mark     uint32                   `json:"mark"`
	Network  string                   `json:"network,omitempty"`  // "none": no interface at all; "host": the machine's own
	Approval *Approval                `json:"approval,omitempty"` // of a kid on the machine's network: who let it be there
	Addr     netip.Addr               `json:"addr"`               // empty without a network of its own
	Cgroup   string                   `json:"cgroup"`
	Created  time.Time                `json:"created"`
	Timings  map[string]time.Duration `json:"timings_ns,omitempty"` // how long the stages of its spawn took, by StageTotal and the like
	Steps    map[string]time.Duration `json:"steps_ns,omitempty"`   // the same in detail: some steps run beside each other
	Proof    bool                     `json:"proof,omitempty"`      // killswitchd's own, for one proof
}

// HoldAgain is how long whoever holds a kid waits before it tries again, where the connection broke.
const HoldAgain = time.Second

// ChangeRequest says why a kid is paused or resumed, for the record.
type ChangeRequest struct {
	Reason string `json:"reason,omitempty"`
}

// MintRequest asks credd for the tokens of a new session.
type MintRequest struct {
	Kid     string        `json:"kid"`
	Session string        `json:"session"`
	Card    string        `json:"card"`
	Mark    uint32        `json:"mark"`
	Secrets []MintSecret  `json:"secrets"`
	Mint    []MintToken   `json:"mint,omitempty"`  // tokens of the box's own issuer
	TTL     time.Duration `json:"ttl_ns"`          // 0: until the session ends
	Proof   bool          `json:"proof,omitempty"` // one token more, for ProofSecret
}

// MintSecret names one vault entry of a session's scope.
type MintSecret struct {
	Name string `json:"name"`
}

// MintToken asks for a token of the box's own issuer, for one service of the user's. Its name is as a secret's, and no
// secret of the same session has it.
type MintToken struct {
	Name     string        `json:"name"`
	Audience string        `json:"audience"`
	Scope    []string      `json:"scope,omitempty"`
	Lifetime time.Duration `json:"lifetime_ns,omitempty"` // of each JWT; 0: the box's own
	Hosts    []string      `json:"hosts,omitempty"`       // "name:port" towards which the proxy puts a JWT in the opaque token's place
	// Inside asks for the JWT itself in the reply, for a kid that reaches the service without the proxy. It has no hosts.
	Inside bool `json:"inside,omitempty"`
}

// MintReply maps each secret's name to the session's opaque token for it, or to the JWT itself where it was asked for. Even a session with no secrets
// gets an entry in credd, so that a revocation always has something to acknowledge.
type MintReply struct {
	Tokens map[string]string `json:"tokens"`
	// Renew is how long it takes until there are new JWTs, where the kid holds some itself; 0: it holds none.
	Renew time.Duration `json:"renew_ns,omitempty"`
}

// ResolveRequest asks for the value behind a token, towards one host and port. Method, Path and Place say truthfully in
// what the token was found; a secret that is presented in one way is refused where they are missing.
type ResolveRequest struct {
	Mark   uint32       `json:"mark"`
	Token  string       `json:"token"`
	Host   string       `json:"host"`
	Port   uint16       `json:"port"`
	None   bool         `json:"none,omitempty"`   // no credential belongs here: say what the token is, and refuse it
	Method string       `json:"method,omitempty"` // of the request, in capitals
	Path   string       `json:"path,omitempty"`   // its target in origin form as it came, with or without a query
	Place  Presentation `json:"place,omitzero"`   // where the token stood
}

// ResolveReply carries the value; the proxy uses it for one request and forgets it. Refusals are Problems
// with reason token-unknown or token-scope.
type ResolveReply struct {
	Secret  string       `json:"secret"` // its name, for the record
	Value   string       `json:"value"`
	Present Presentation `json:"present,omitzero"` // how the value is to stand in the request
	Minted  bool         `json:"minted,omitempty"` // the value is a JWT that was made for minutes
	// SessionToken goes with temporary keys that requests are signed with (X-Amz-Security-Token); empty: with none.
	SessionToken string `json:"session_token,omitempty"`
}

// RevokeRequest revokes whole sessions, or all of them.
type RevokeRequest struct {
	Marks []uint32 `json:"marks,omitempty"`
	All   bool     `json:"all,omitempty"`
	Nonce string   `json:"nonce,omitempty"` // comes back in the reply
	Tag   string   `json:"tag,omitempty"`   // what whoever uses such a token is told, MaxTagText bytes at most; empty: nothing
}

// MaxTagText bounds RevokeRequest.Tag, in bytes; what is above is cut off.
const MaxTagText = 512

// RevokeReply acknowledges: from now on no token of those sessions is accepted.
type RevokeReply struct {
	Revoked int    `json:"revoked"` // tokens forgotten
	Nonce   string `json:"nonce,omitempty"`
}

// Introspection is RFC 7662's answer.
type Introspection struct {
	Active  bool   `json:"active"`
	Session string `json:"sid,omitempty"`
	Kid     string `json:"sub,omitempty"`
	Scope   string `json:"scope,omitempty"`

	// Of JWTs of the box's own issuer alone; Kid is their SPIFFE ID then. Times are seconds since 1970.
	TokenType string `json:"token_type,omitempty"`
	Client    string `json:"client_id,omitempty"`
	Issuer    string `json:"iss,omitempty"`
	Audience  string `json:"aud,omitempty"`
	ID        string `json:"jti,omitempty"`
	IssuedAt  int64  `json:"iat,omitempty"`
	NotBefore int64  `json:"nbf,omitempty"`
	Expires   int64  `json:"exp,omitempty"`
}
