package main

import (
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"regexp"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"tagout/internal/instance"
	"tagout/internal/wire"
)

func (a *app) tokenCommand() *cobra.Command {
	cmd := group("token", "List, show and revoke the tokens that sessions hold; a token itself is never shown")
	cmd.AddCommand(a.tokenListCommand(), a.tokenShowCommand(), a.tokenRevokeCommand())
	return cmd
}

// tokenIDRE is an id as records have it. A token itself must not be taken for one: it would end in a shell's history.
var tokenIDRE = regexp.MustCompile(`^[0-9a-f]{12}$`)

func checkTokenID(id string) error {
	if id != "" && !tokenIDRE.MatchString(id) {
		return usage(errors.New("a token is named by its id: 12 hex digits, as `tagout token ls` and the field token_id of records have it"))
	}
	return nil
}

func selectionFlags(cmd *cobra.Command, sel *wire.TokenSelection) {
	cmd.Flags().StringVar(&sel.Kid, "kid", "", "all tokens of the kid")
	cmd.Flags().StringVar(&sel.Session, "session", "", "all tokens of the session")
	cmd.Flags().StringVar(&sel.Secret, "secret", "", "the secret's tokens, of all sessions")
}

// tokens asks credd for the tokens that sel means; without a field, for all.
func (a *app) tokens(cmd *cobra.Command, sel wire.TokenSelection) ([]wire.TokenInfo, error) {
	q := url.Values{}
	for key, value := range map[string]string{"kid": sel.Kid, "session": sel.Session, "id": sel.ID, "secret": sel.Secret} {
		if value != "" {
			q.Set(key, value)
		}
	}
	infos := []wire.TokenInfo{}
	err := a.call(cmd, instance.Credd, http.MethodGet, "/v1/tokens?"+q.Encode(), nil, &infos)
	return infos, err
}

func (a *app) tokenListCommand() *cobra.Command {
	var sel wire.TokenSelection
	cmd := &cobra.Command{
		Use: "ls", Aliases: []string{"list"}, Short: "List the tokens that would be accepted now", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if sel.Fields() > 1 {
				return usage(errors.New("name one of --kid, --session and --secret"))
			}
			infos, err := a.tokens(cmd, sel)
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(infos)
			}
			return a.printTokens(infos)
		},
	}
	selectionFlags(cmd, &sel)
	return cmd
}

func (a *app) printTokens(infos []wire.TokenInfo) error {
	w := tabwriter.NewWriter(a.out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "ID\tSECRET\tKID\tCARD\tMINTED\tEXPIRES IN")
	for _, i := range infos {
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\n", i.ID, i.Secret, i.Kid, i.Card, i.Minted.Format(time.RFC3339), expiresIn(i))
	}
	return w.Flush()
}

func expiresIn(i wire.TokenInfo) string {
	if i.Expires.IsZero() {
		return "with its session"
	}
	return i.Left.Round(time.Second).String()
}

func (a *app) tokenShowCommand() *cobra.Command {
	return &cobra.Command{
		Use: "show ID", Short: "Show one token: whose it is, what for, and how long it lives", Args: wants("ID"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := checkTokenID(args[0]); err != nil {
				return err
			}
			infos, err := a.tokens(cmd, wire.TokenSelection{ID: args[0]})
			if err != nil {
				return err
			}
			if len(infos) == 0 {
				return fmt.Errorf("token %s is not accepted now: it is unknown, revoked or expired; `tagout timeline` shows what became of it", args[0])
			}
			if a.json {
				return a.printJSON(infos[0])
			}
			i := infos[0]
			a.printf("id       %s\nsecret   %s\nkid      %s\nsession  %s\ncard     %s\nminted   %s\nexpires  ", i.ID, i.Secret, i.Kid, i.Session, i.Card, i.Minted.Format(time.RFC3339))
			if i.Expires.IsZero() {
				a.printf("with its session\n")
				return nil
			}
			a.printf("in %s, at %s\n", expiresIn(i), i.Expires.Format(time.RFC3339))
			return nil
		},
	}
}

func (a *app) tokenRevokeCommand() *cobra.Command {
	var req wire.TokenRevokeRequest
	cmd := &cobra.Command{
		Use:   "revoke [ID]",
		Short: "Revoke one token, or all of a kid, of a session or for a secret, at once and for good",
		Long: `Revoke tokens. What is named is not accepted any more from the moment on in which this
command ends, and requests under way that carry what they stood for are cut. After
--kid or --session the session gets no token any more; nothing else of it changes:
its processes go on (see tagout stop). After an ID or --secret the other tokens of
these sessions stay.`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 1 {
				req.ID = args[0]
			}
			if err := checkTokenID(req.ID); err != nil {
				return err
			}
			if req.Fields() != 1 {
				return usage(errors.New("say what is revoked: an ID, --kid, --session or --secret, one of them"))
			}
			if len(req.Reason) > wire.MaxTagText {
				return usage(fmt.Errorf("the reason is longer than %d bytes", wire.MaxTagText))
			}
			var reply wire.TokenRevokeReply
			if err := a.call(cmd, instance.Credd, http.MethodPost, "/v1/tokens/revoke", req, &reply); err != nil {
				return err
			}
			if a.json {
				return a.printJSON(reply)
			}
			for _, i := range reply.Revoked {
				a.printf("token %s of kid %s for %s is revoked\n", i.ID, i.Kid, i.Secret)
			}
			if len(reply.Revoked) == 0 {
				a.printf("the session had no token, and gets none any more\n")
			}
			return nil
		},
	}
	selectionFlags(cmd, &req.TokenSelection)
	cmd.Flags().StringVar(&req.Reason, "reason", "", "why, for the record")
	return cmd
}
